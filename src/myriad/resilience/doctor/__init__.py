"""Is this node fit to train? One node in seconds, and the one bad node among many in a few rounds.

diagnosis = diagnose(folder=run) every check of `node`, each an `Item` with its verdict culprits =
find_culprits(names, measure) pairwise rounds: which node or link is to blame (`rounds`)
"""
