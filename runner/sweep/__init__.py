"""Sweeps that survive: what became of every job is in the sweep's folder, so a sweep that is started again there runs
what is missing.

A sweep folder holds `sweep.json` (when it was last started), a folder per job with `job.json` beside the files of any
run, and, made from these alone when a sweep ends, `results.csv` and `report.html`. Jobs may run in other processes or
on other hosts: all that they and the command share is this folder.
"""
