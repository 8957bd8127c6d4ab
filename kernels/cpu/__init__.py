"""The operations in C++, built once per machine or with an image."""
