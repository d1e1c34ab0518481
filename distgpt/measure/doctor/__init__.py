"""The doctor: facts about this machine, its hosts and their speed, and what they mean for each stage.

Not here: opening a stage (core/cpu/stages.py), starting processes (jobs/).
"""
