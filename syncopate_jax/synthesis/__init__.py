"""Plans made for a topology: matched, routed and bounded from below; not copied from a template."""
