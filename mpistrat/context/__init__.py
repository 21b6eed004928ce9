"""Where this code runs: the current strategy and replica, and the values that have a component on each replica."""
