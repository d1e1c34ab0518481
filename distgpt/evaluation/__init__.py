"""How good a model is: losses of spans of text, validation, HellaSwag, and a report of them.

Not here: the loss of a training step (training/).
"""
