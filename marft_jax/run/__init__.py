"""The life of a run: its session, checkpoints, guard, lock, metrics, reports and transcripts.

``setup`` opens a session, ``checkpoints`` saves and restores, ``trained`` opens a finished run,
``reporters`` writes what happens. Nothing is imported here: reports are read without JAX.
"""
