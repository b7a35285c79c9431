"""Where bytes live when they are not on the device, and how they come and go: host, disk, remote store."""
