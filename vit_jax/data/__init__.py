"""Reads records and makes batches.

`sources` opens a dataset with random access. `bad_images` finds its unreadable
images before training. `decode` and `transforms` turn a record into an
example. `loader` makes batches, each a pure function of the seed and the step.
"""
