"""Moving bytes between memory and devices: one protocol, its transports, and the choice of one."""
