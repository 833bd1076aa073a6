"""Resumable sweeps: the outcome of every job is in the sweep's folder, so a restarted sweep runs only the missing jobs.

A sweep folder holds `sweep.json` (when it was last started), a folder per job with `job.json` beside the files of any
run, and, made from these alone when a sweep ends, `results.csv` and `report.html`. Jobs may run in other processes or
on other hosts: this folder is all that they share with the command.
"""
