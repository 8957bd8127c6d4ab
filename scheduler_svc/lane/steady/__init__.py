"""Steps of a lane that is in a steady state: every row decodes, and nothing else changes.

The lane's loop decides such steps as well, and begins with every other step. It passes through a
dozen modules for that, most of which find nothing to do, at a cost that does not depend on the
number of rows; and each of them visits all rows. Here a step is two callbacks: a result with the
expected rows leads to the next commit, and its reply to the next plan. Anything else ends the
steady state before it is touched, and the loop continues.

    columns     what the rows have in common, in parallel lists
    entry       whether a lane is in a steady state
    decoding    the two callbacks
"""
