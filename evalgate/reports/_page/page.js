// The theme: as the system has it, until the button says otherwise. Kept where the browser allows it.
(() => {
  "use strict";
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => { try { return localStorage.getItem("evalgate-theme"); } catch { return null; } };
  const keep = (name) => { try { localStorage.setItem("evalgate-theme", name); } catch { /* not allowed here */ } };
  const dark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const label = () => {
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Use the ${dark() ? "light" : "dark"} theme`);
  };
  if (["light", "dark"].includes(stored())) root.dataset.theme = stored();
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    keep(root.dataset.theme);
    label();
  });
  system.addEventListener("change", label);
  label();
})();
