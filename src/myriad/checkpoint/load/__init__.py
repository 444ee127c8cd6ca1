"""Load the state that a run resumes from.

state_search       the newest step that verifies, in memory or in storage
start_over         whether a run without such a step may start at step 1
read_plan          which rank reads which bytes from where, and sends them to which ranks
collective_load    all ranks execute the plan
"""
