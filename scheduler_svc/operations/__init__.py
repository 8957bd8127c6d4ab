"""What operators see of the scheduler, and what they may tell it."""
