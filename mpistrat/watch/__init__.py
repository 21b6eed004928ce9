"""What each rank is doing: a record of every collective that other processes can read, and a thread that finds deadlocks."""
