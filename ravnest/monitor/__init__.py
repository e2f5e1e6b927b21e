"""What a run tells about itself: events, metrics, summary and display."""
