// Updates a live page: requests it again every few seconds, and replaces the parts that changed.
// All pages work without this script; the user then reloads them.
"use strict";

const INTERVAL_MS = 2500;
const RETRY_MS = 15000;
let version = document.body.dataset.version;
let failures = 0;

function showState(state, text) {
  const pulse = document.getElementById("pulse");
  if (!pulse) return;
  pulse.dataset.state = state;
  if (pulse.textContent !== text) pulse.textContent = text;
}

// A part is not replaced while the user types in it, has details open, or has selected rows.
function inUse(part) {
  const active = document.activeElement;
  if (active && part.contains(active) && active.matches("input, select, textarea")) return true;
  return part.querySelector("details[open], input:checked") !== null;
}

// Replaces a part; keeps focus and scroll positions, and highlights new rows.
function replacePart(old, fresh) {
  const known = new Set([...old.querySelectorAll("[id]")].map((e) => e.id));
  const focused = old.contains(document.activeElement) ? document.activeElement : null;
  const path = focused && (focused.id ? "#" + CSS.escape(focused.id) : focused.getAttribute("href"));
  const scrolled = [...old.querySelectorAll(".scroll")].map((e) => e.scrollLeft);
  const next = document.importNode(fresh, true);
  for (const row of next.querySelectorAll("tr[id], article[id]")) {
    if (!known.has(row.id)) row.classList.add("fresh");
  }
  old.replaceWith(next);
  addSelectAll();
  next.querySelectorAll(".scroll").forEach((e, i) => { e.scrollLeft = scrolled[i] || 0; });
  if (path) {
    const again = path[0] === "#" ? next.querySelector(path)
      : [...next.querySelectorAll("a")].find((a) => a.getAttribute("href") === path);
    if (again) again.focus({ preventScroll: true });
  }
}

async function update() {
  if (document.hidden) return;
  const response = await fetch(location.href, {
    headers: { "X-Live": "1", "If-None-Match": version }, cache: "no-store", redirect: "manual",
  });
  if (response.type === "opaqueredirect") {
    location.reload();
    return;
  }
  if (response.status !== 304) {
    if (!response.ok) throw new Error(String(response.status));
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    let deferred = false;
    for (const part of document.querySelectorAll("[data-live][id]")) {
      const fresh = page.getElementById(part.id);
      if (!fresh || fresh.outerHTML === part.dataset.was) continue;
      if (inUse(part)) { deferred = true; continue; }
      const was = fresh.outerHTML;
      replacePart(part, fresh);
      document.getElementById(part.id).dataset.was = was;
    }
    if (!deferred) version = response.headers.get("ETag") || version;
  }
  failures = 0;
  showState("well", "live");
}

async function loop() {
  try {
    await update();
  } catch (error) {
    failures += 1;
    showState("lost", "connection lost");
  }
  setTimeout(loop, failures > 2 ? RETRY_MS : INTERVAL_MS);
}

// A box in the toolbar of a table or list selects all rows of the page.
function addSelectAll() {
  const form = document.getElementById("bulk");
  if (!form || form.querySelector("[data-all]")) return;
  const all = document.createElement("input");
  all.type = "checkbox";
  all.dataset.all = "1";
  const label = document.createElement("label");
  label.append(all, "Select all");
  form.prepend(label);
  const boxes = () => [...document.querySelectorAll("input[type=checkbox][form=bulk]")];
  all.addEventListener("change", () => { for (const box of boxes()) box.checked = all.checked; });
}

// Scrolls a matrix to its newest columns, so that its fixed first column covers no part of another one.
function showNewest(grid) {
  const box = grid.parentElement, fixed = grid.querySelector("tbody th")?.offsetWidth || 0, end = box.scrollWidth - box.clientWidth;
  const starts = [...grid.querySelectorAll("tbody tr:first-child td")].map((e) => e.offsetLeft - fixed);
  const start = starts.find((x) => x >= end) ?? end;
  if (end > 0) box.style.paddingRight = `${start - end}px`;
  box.scrollLeft = start;
}

for (const part of document.querySelectorAll("[data-live][id]")) part.dataset.was = part.outerHTML;
addSelectAll();
document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
document.querySelectorAll(".matrix").forEach(showNewest);
if (version) setTimeout(loop, INTERVAL_MS);
