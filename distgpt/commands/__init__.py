"""The commands of the command line, one file each: parse, build, call.

Not here: logic. What a command does stands in the folder it calls.
"""
