"""Commands that look at a request or a project: verify, calibrate and dashboard."""
