"""Programs for a Python with PyTorch: started by path, so they import none of distgpt but what lies here."""
