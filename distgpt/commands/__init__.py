"""The commands of the command line, by families: parse, build, call; and the options they share.

Not here: what a command does (the room that it calls), and the settings (core/config/).
"""
