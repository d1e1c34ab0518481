"""python -m distgpt"""

from distgpt.cli import main

main()
