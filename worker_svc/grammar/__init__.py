"""Output that follows a grammar: which tokens may follow those of each row."""
