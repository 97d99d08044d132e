"""Records in, device batches out.

`sources` opens a dataset as random access, `bad_images` finds its unreadable
images before training does, `decode` and `transforms` make pixels of a record,
and `loader` makes batches that are a pure function of the seed and the step.
"""
