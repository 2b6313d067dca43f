"""Statistics of the token-score table: the document is the unit of sampling, and everything is seeded.

intervals makes every interval, by clustered (means), bootstrap and ordered (percentiles, correlations), estimated
(values with errors of their own) and rare (documents that show no spread). summarize turns the whole table into the
groups of a summary. Beside them: paired (differences on the same positions), slices, sequential, samplesize, mcnemar
and excess.
"""
