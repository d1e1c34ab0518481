"""The commands, grouped in modules (parse options, build objects, call), and their shared options.

Not here: the work of a command (the package that it calls), and the settings (core/config/).
"""
