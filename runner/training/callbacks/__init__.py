"""Callbacks that ship with the project; `runner.training.hooks` describes what a callback is."""
