"""gio_uring: rings of IOCBs whose fragments GPU or CPU threads turn into NVMe commands."""
