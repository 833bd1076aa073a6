"""The front end of Meshwright: from a command line to a run, and the ranks that carry it out.

`runner.cli` is the command, `runner.schema` the shape of a config, `runner.jobs` holds one verb per file.
Importing this package imports nothing else: torch must not be loaded before a config is known to be good.
"""
