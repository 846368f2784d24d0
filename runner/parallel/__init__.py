"""Building blocks of plugins: the device mesh, and a module for each kind of parallelism."""
