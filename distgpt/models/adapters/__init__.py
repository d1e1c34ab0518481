"""LoRA: adapters beside the matrices of a model that stays as it is, trained, saved, and used in text.

Not here: models without adapters (core/model/).
"""
