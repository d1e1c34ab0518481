"""Recipes: options that stand for several settings, as --depth, --within and --decay.

A recipe is a function from what is asked for to what is asked for, with more of it said (recipes.py has them
in their order). Not here: the settings (core/config/).
"""
