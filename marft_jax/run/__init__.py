"""Life of a run: setup, checkpoints, guard, lock, metrics, reports and transcripts.

``training`` opens a run, ``setup`` what plays in it, ``checkpoints`` saves and restores. Nothing is
imported here: reports are read without JAX.
"""
