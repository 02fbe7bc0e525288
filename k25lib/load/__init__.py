"""The load generator: requests as users send them, timed by the kernel's receive stamps."""
