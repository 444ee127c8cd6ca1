"""Node diagnosis: check one node in seconds, and find the bad node among many in a few rounds.

diagnosis = diagnose(folder=run)             all checks of one node: an `Item` for each (`examine`)
outcome = find_suspects(num_nodes, measure)  pairwise rounds: which node or link is bad (`pair_tests`)
"""
