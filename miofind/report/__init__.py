"""Results as one HTML page that needs no network: roofline, ratios, searches, and a table that sorts and filters."""
