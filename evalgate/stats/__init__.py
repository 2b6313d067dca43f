"""Statistics of the token-score table: the document is the unit of sampling, and everything that is drawn is seeded.

intervals makes every interval, by ratio and clustered (means), ordered and percentiles, correlation, estimated (values
with errors of their own), rare (documents that show no spread) and units (one long text). summarize turns the whole
table into the groups of a summary, and caveats says what to know of them. Beside them: paired (differences on the same
positions), slices, sequential, samplesize, mcnemar and excess.
"""
