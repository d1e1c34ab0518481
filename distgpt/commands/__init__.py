"""The commands of the command line, by families: parse, build, call; and the options they share.

Not here: what a command does, which stands in the folder that it calls, and what a setting is (core/config/).
"""
