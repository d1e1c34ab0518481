"""The commands of the command line, one file each: parse, build, call. No logic."""
