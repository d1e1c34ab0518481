"""`distgpt doctor`: facts about this machine and its hosts, and the stages they can run.

Not here: opening a stage (core/cpu/stages.py), starting processes (jobs/).
"""
