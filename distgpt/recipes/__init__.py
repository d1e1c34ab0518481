"""Recipes: options that stand for several settings, such as --depth, --within and --decay.

A recipe is a function from a request to a more detailed request; `recipes.py` has their order.
Not here: the settings (core/config/).
"""
