"""What surrounds the episodes of a task: tried again, counted, watched for what is broken."""
