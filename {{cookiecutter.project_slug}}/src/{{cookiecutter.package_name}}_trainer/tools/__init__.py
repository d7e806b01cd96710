"""Commands about a run: plan it, check the machine, reproduce it, report on it.

Each is a folder, and no file outside ``tools/`` names it; deleting the folder removes the command.
Each has ``HELP`` and ``run(program, words)``, with the words after the command, and may have
``AFTER_FIT``, the line that ``fit`` prints at its end. Imports from all other folders.
"""
