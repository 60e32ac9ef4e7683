"""The cluster planner: memory and time of a step on many GPUs, by formula, for every strategy that forge has.

`hardware` knows GPUs and their links, `step` what an update costs one device, `formulas` what a layout makes of both.
"""
