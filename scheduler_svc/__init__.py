"""The scheduler: decides who runs, on which worker, with which blocks."""
