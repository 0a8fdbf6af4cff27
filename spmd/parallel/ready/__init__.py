"""Plans that are ready: what a stock model becomes on a mesh, found by its structure (docs/design/ready-plans.md)."""
