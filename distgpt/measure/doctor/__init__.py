"""`distgpt doctor`: facts about this machine and its hosts, and what they mean for each stage.

Not here: opening a stage (core/cpu/stages.py), starting processes (jobs/).
"""
