"""The Trainer under kills, full disks and changing numbers of processes."""
