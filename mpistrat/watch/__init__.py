"""What is each rank doing? A record of every collective, readable from outside, and a thread that tells who waits for whom."""
