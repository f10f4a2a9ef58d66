"""Devices and processes: the mesh, what crosses between processes, shape ladders, compilation."""
