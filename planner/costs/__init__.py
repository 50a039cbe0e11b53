"""Work to seconds: roofline with efficiency curves, measured and imported profiles."""
