"""Whether anything is lost: streams that are always open, and faults at random moments.

mix         the requests, drawn from a seed
comparison  one stream against the same request run undisturbed
streams     the clients
stack       the processes, and whoever starts them again
faults      what is done to them
steady      when they have recovered
gaps        how long the streams stood still
ending      what has to hold when all is over
experiment  one run, from the start of the stack to its findings
tables      findings as tables
"""
