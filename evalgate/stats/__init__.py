"""Statistics of the token-score table: the document is the unit of sampling, and everything is seeded.

clustered (means), bootstrap (percentiles and the rest), paired (differences on the same positions),
summarize (the whole table into the groups of a summary), slices, sequential, samplesize, holm, mcnemar.
"""
