"""The version of the internal protocols; services of different versions refuse each other."""

PROTOCOL_VERSION = 7
