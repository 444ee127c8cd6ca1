"""Memory of a rank in bytes: by closed form for many layouts, from its program for one."""
